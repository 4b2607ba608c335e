"""The oracle: the paper's algorithms on plain Python floats, importing nothing of the package.

A parameter vector is a list of floats, a block a list of its indices; each block has its own b.
Every algorithm yields (x, [b of each block]) after each step.
"""

from itertools import count, repeat
from math import sqrt


def sq_norm(g, block):
    return sum(g[i] * g[i] for i in block)


def algorithm_1(x, grad, b):
    """Batch WNGrad: x moves by the old b, then b takes in the gradient at the new x."""
    while True:
        g = grad(x)
        x = [xi - gi / b for xi, gi in zip(x, g)]
        g = grad(x)
        b = b + sq_norm(g, range(len(g))) / b
        yield x, b


def start(g, block, lam, b1, c):
    """b₁: a number, or C·λ·‖g₁‖ (Remark 2.2); None while the gradient is zero."""
    norm = sqrt(sq_norm(g, block))
    return b1 if c is None else (c * lam * norm or None)


def each_rate(rate):
    """λ of every step: a number, or a function of the step's number."""
    return map(rate, count()) if callable(rate) else repeat(rate)


def algorithm_3(x, grad, rate, blocks, b1=1.0, c=None, mu=0.0, decay=0.0, decoupled=False):
    """WNGrad for the scaled loss, b first; with momentum, a sum of steps each with its own λ."""
    b, v = [None] * len(blocks), [0.0] * len(x)
    for lam in each_rate(rate):
        g = [gi + (0 if decoupled else decay) * xi for gi, xi in zip(grad(x), x)]
        x = [xi * (1 - lam * decay) if decoupled else xi for xi in x]
        for k, block in enumerate(blocks):
            b[k] = b[k] or start(g, block, lam, b1, c)
            if b[k]:
                b[k] = b[k] + lam**2 * sq_norm(g, block) / b[k]
                for i in block:
                    v[i] = mu * v[i] + lam * g[i] / b[k]
                    x[i] = x[i] - v[i]
        yield list(x), list(b)


def algorithm_4(x, grad, rate, blocks, b1=1.0, c=None, beta=0.9, decay=0.0, decoupled=False):
    """WN-Adam: the running mean of the scaled loss's gradient λg, the norm of the raw one."""
    b, m, t = [None] * len(blocks), [0.0] * len(x), 0
    for lam in each_rate(rate):
        g = [gi + (0 if decoupled else decay) * xi for gi, xi in zip(grad(x), x)]
        x, t = [xi * (1 - lam * decay) if decoupled else xi for xi in x], t + 1
        for k, block in enumerate(blocks):
            b[k] = b[k] or start(g, block, lam, b1, c)
            if b[k]:
                b[k] = b[k] + lam**2 * sq_norm(g, block) / b[k]
                for i in block:
                    m[i] = beta * m[i] + (1 - beta) * lam * g[i]
                    x[i] = x[i] - m[i] / b[k] / (1 - beta**t)
        yield list(x), list(b)
