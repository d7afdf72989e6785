"""The methods: a file a paper, which says what its learners are, what they minimise and what it draws of them."""
