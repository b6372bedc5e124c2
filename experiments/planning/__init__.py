"""What a model and its cache need on a slice of TPUs, by compilation."""
