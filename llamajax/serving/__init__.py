"""An HTTP server of models, in the form of OpenAI's: requests of many users, generated together in the slots of one cache."""
