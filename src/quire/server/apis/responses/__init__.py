"""Responses API of OpenAI, without stored state: input items to a chat request, output to items and their events."""
