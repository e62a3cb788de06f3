"""OpenAI's Responses API without storage: its requests become chats, and what chats answer is told as its items.

Reading order: request (with items: a conversation as the API writes it) → routes → answer (the response object and its
events) → output (the items of an answer, as they come). Nothing is kept: an answer is told once.
"""
