"""What is installed, what each engine's own settings compute, and the line that mends it. Imports no engine."""
