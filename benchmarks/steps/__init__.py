"""The parts of `benchmarks/step.py`: what is stepped, by whom, how it is timed, what is said."""
