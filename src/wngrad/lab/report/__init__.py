"""What is made of records: tables, claims, figures and pages."""
