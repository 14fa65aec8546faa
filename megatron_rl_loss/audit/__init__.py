"""What does a loss do to each token? Measured weights, what they are, and what is wrong with them."""
