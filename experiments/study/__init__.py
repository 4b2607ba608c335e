"""A study of b₁: WNGrad over twelve decades against constant steps and AdaGrad-Norm."""
