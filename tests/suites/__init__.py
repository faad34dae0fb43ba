"""The tests of other libraries, plain and streamed: `make suites`; what they found is in docs/reference/suites.md."""
