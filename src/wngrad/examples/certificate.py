"""A certificate: minimize a function without knowing its Lipschitz constant, then check the theory.

    python FILE

Here the function is a logistic regression; NumPy is all it takes.
"""

import numpy as np

from wngrad import minimize

draw = np.random.default_rng(0)
A = draw.normal(size=(200, 5))
LABELS = np.sign(A @ draw.normal(size=5) + draw.normal(size=200))
RIDGE = 0.1


def value_and_gradient(x: np.ndarray) -> tuple[float, np.ndarray]:
    margin = LABELS * (A @ x)
    value = np.logaddexp(0, -margin).mean() + RIDGE / 2 * x @ x
    gradient = A.T @ (-LABELS / (1 + np.exp(margin))) / len(A) + RIDGE * x
    return float(value), gradient


def main() -> None:
    result = minimize(value_and_gradient, np.zeros(5), jac=True, tol=1e-10, trace=True)
    print(result.message)
    # L is known here, so that the theorem can be checked; the run itself has not used it.
    lipschitz = np.linalg.eigvalsh(A.T @ A)[-1] / (4 * len(A)) + RIDGE
    certificate = result.certify(lipschitz=float(lipschitz), f_star=0.0)
    print(certificate)  # each inequality of the paper: measured, bound, and what it assumes
    print("all claims hold" if certificate.holds else "a claim does not hold")


if __name__ == "__main__":
    main()
