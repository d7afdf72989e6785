"""The methods, one file per paper: what the learners are, what they minimise, and the pictures of them."""
