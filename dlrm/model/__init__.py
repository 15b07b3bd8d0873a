"""Networks: no training, no data, no flags."""
