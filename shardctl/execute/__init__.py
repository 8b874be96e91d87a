"""The engine: copies what the plan says in bounded memory, resumable, digesting as it goes."""
