"""Load balance of experts: losses, the tokens they count, and the loss-free bias."""
