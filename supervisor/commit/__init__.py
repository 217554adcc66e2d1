"""How a checkpoint becomes visible: the commit log, its rules, and everything that appends to it."""
