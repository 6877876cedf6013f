"""What servers and clients of the tests in `e2e` agree on."""

MODEL = "reciter"     # the name under which the model is served
KEY = "sesame"        # what clients need
LIMIT_S = 120.0       # after which a client gives up
