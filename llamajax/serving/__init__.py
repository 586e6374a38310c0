"""An HTTP server of models, in the form of OpenAI's: texts of many requests, written together in the slots of one cache."""
