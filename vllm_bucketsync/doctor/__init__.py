"""What will work on this machine and why not, found out by trying it.

A check is a function that returns ``Finding``: plain data. Nothing here prints, and what
might hang or crash (a device, another process) is tried in processes of its own.
"""
