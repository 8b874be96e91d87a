"""Text, JSON, JUnit and Markdown views of results."""
