"""Using a trained model: top-k for a user, a history or everybody; export; and `fit`, from a frame to a model."""
