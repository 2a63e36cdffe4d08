"""The plan of a run: options, facts about the data and the machine in; numbers out. No torch."""
