"""The ranks of this node: the socket they speak over, their control pages and image slots."""
