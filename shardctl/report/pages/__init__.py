"""Shows results as HTML pages that stand alone: no script, no network, for phones, the dark and paper."""
