"""Text over a WebSocket: OpenAI's realtime events on a session of this server."""
