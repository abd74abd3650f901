"""What a backbone has learnt: measures of features, as pure functions over streams of them."""
