"""One script per question: `python -m benchmarks.NAME [--quick] [--device cpu|cuda] [--data DIR] [--out DIR]`."""
