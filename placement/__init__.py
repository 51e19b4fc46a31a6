"""Who runs where: grammar, modes, plans. Pure planning; imports nothing else of the toolkit."""
