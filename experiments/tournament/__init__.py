"""The tournament: WNGrad among its rivals, at their defaults and over the decades of λ."""
