"""Changes of the weights that leave the float model as it is and make it easier to round."""
