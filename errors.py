class Refused(Exception):
    """What the user asked for cannot be done. The message is one line: what is wrong, and how to go on."""
