"""The command line: one verb a file, heavy imports inside the verb."""
