"""Text, JSON, JUnit and Markdown views of results: pure functions, which never print."""
