"""Verbs of the command line that have a file each: `command` is the function, the file's name the verb."""
