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

# Less than a minute: the foundation, every reader and writer, and eight of the families.
quick *options:
    pytest -n 2 --dist worksteal -q {{options}} \
        --families llama,gpt2,mixtral,deepseek_v3,gemma4,mamba2,t5,qwen3_vl \
        tests/test_affine.py tests/test_bands.py tests/test_box.py tests/test_cast.py tests/test_copyplan.py \
        tests/test_mesh.py tests/test_record.py tests/test_value.py tests/test_views.py \
        tests/libraries/test_conformance.py tests/models/test_binding.py tests/models/test_cuts.py \
        tests/models/test_families.py tests/memory/test_anatomy.py tests/roundtrip/test_roundtrip_architectures.py

# Rewrites the tables of the documentation that programs make.
tables:
    python docs/pairs.py
    python docs/models.py
    python docs/reference.py
