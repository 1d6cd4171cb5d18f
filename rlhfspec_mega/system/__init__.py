"""All processes of one run: those that train, those that generate, and the weights between them."""
