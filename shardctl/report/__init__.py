"""Renders results as text, JSON, JUnit and Markdown, with pure functions that never print."""
