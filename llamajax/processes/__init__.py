"""Connects the processes of a run: they find each other, agree, show that they are alive, and end."""
