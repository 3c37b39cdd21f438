"""`make demo`: the whole path on real input, from `kubectl apply` to bit-equal logits, on this machine."""
