"""How robust is this model, and can the answer be trusted?"""
