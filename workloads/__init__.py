"""The data plane: data sets, label spaces, training and transfer."""
