"""What takes long and rarely breaks: launchers, whole commands, the matrix of modes (`nox -s slow`)."""
