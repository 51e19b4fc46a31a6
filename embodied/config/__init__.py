"""From a recipe and key=value words to one validated, frozen RunConfig, and the answers to mistakes in them."""
