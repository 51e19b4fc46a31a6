"""The generated puzzles of reasoning_gym, as a text env."""
