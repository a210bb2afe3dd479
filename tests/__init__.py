"""The test-suite; a package so that ``tests.oracles`` can be imported from anywhere in it."""
