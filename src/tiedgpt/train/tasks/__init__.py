"""What a run learns: the task, its data from files to rows, and how its model is published."""
