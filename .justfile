# What to run before a commit, and what CI runs: `just check`. `just --list` names the rest.

# Lint, types and every test.
check: lint types site test

# Style, and the mistakes that a linter sees.
lint:
    ruff check .
    ruff format --check .

# Types, strictly.
types:
    mypy

# The documentation site, into build/site; a link that leads nowhere is an error.
site:
    mkdocs build --quiet --strict --config-file .mkdocs.yml

# The tests; `just test tests/cli -k plan` runs some of them, `just test -m "not slow"` all but the slow ones.
test *options:
    pytest -n 2 --dist worksteal -q --durations 15 {{options}}

# Rewrites the tables of the documentation that programs make.
tables:
    python docs/pairs.py
    python docs/models.py
