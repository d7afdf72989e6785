"""What a configuration is: where its files lie, what its options may be, what it is made of."""
