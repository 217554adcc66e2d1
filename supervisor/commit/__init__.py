"""How a checkpoint becomes visible: the commit log, its rules, and all that appends to it."""
