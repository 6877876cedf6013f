"""OpenAI-compatible HTTP server over an engine in a child process. Loads no torch; only `inspect` looks at blocks.

`start` binds the port and spawns the engine, `lifecycle` serves until a signal, `app` assembles the routes, `service`
holds what they share. From the socket inwards: `http` has the protocol, `apis` the routes of each API, `api` what all
APIs share, `tools` calls and reasoning in outputs, `grammars` checks of constraints, `templates` the rendering of
chats, `images` their images, `limits` the bounds on clients, `inspect` explanations and the block map.
"""
