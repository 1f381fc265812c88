"""What every other room stands on: errors, pytrees, abstract values, flags, and the one seam to private torch names."""
