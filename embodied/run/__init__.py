"""A run on disk, where its policy comes from, whether machines can hold it, and what is around every command."""
