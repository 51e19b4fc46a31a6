"""A policy behind a websocket that speaks openpi's protocol: `codec` the bytes, `questions` what clients ask, `server`
the connections, `config` the options."""
