"""The processes of a run: how they find each other, agree, show that they live, and end."""
